"""Methods beside each other on suites of environments, with settings chosen by the same budget on validation rows.

| module          | what it does                                                      |
|-----------------|-------------------------------------------------------------------|
| suites          | which environments, how many trials; `suites/*.toml` or a file    |
| contenders      | which methods, with which grids of settings; `contenders.toml`    |
| runs            | makes one run and records it                                      |
| records         | a file for each run                                               |
| plan            | what is to be run: first to choose settings, then the trials      |
| statistics      | ranks, tests, intervals, rounds to a score                        |
| summary         | from the records to numbers                                       |
| page, figures   | from the numbers to README.md, results.json and the diagrams      |
"""
