"""One HTML file for one run folder or several: `fedunfold report`.

A folder is read (`reading`), runs of the same federation are put beside each other (`groups`), what they say is told
in sentences (`findings`) and drawn (`charts`), and all of it goes into one file that needs no network (`building`).
"""

from fedunfold.report.render import Page as Page
from fedunfold.report.render import build as build
from fedunfold.runs.reader import RunRecord as RunRecord
from fedunfold.runs.reader import read_runs as read_runs
