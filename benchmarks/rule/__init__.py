"""How well a pre-trained rule does, beside rivals whose settings were chosen on the same federations as it was learned.

    python -m benchmarks rule --rule FILE_OR_NAME --out docs/results/rule [--only SECTION,…] [--processes N]

| module      | what it does                                                  |
|-------------|---------------------------------------------------------------|
| sections    | what is run: federations, methods, trials; the choice of settings |
| federations | makes a section's federation by its name                      |
| entrants    | makes a method of its description; loads the rule             |
| runs        | carries out one run and records it, many at a time            |
| records     | keeps the records, merges and resumes                         |
| statistics  | intervals, win rates, rounds to a score                       |
| tables, page | from the records to docs/results/rule                        |
| responses   | what the rule decides where one feature changes; figures      |
"""
