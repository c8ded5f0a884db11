"""What a person looks at: figures, tables, and the folder a run leaves behind."""
