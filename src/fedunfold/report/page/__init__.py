"""One HTML file for one run folder or several: `fedunfold report`.

A folder is read (`reading`), runs of the same federation are put beside each other (`groups`), what they say is told
in sentences (`findings`) and drawn (`charts`), and all of it goes into one file that needs no network (`building`).
"""

from fedunfold.report.page.building import Page as Page
from fedunfold.report.page.building import build as build
from fedunfold.report.page.reading import RunRecord as RunRecord
from fedunfold.report.page.reading import read_runs as read_runs
