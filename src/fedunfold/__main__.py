"""`python -m fedunfold`."""

from fedunfold.cli import main

main()
