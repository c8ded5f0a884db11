"""An app for tests over a deployment."""
