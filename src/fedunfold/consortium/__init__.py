"""One recipe, applied at each site: what sites tell of their tables, what is agreed on, and what each makes of it.

`describe` says what may leave a site, `agree` makes a recipe of all descriptions, `apply` makes a site's arrays by it,
and `start` runs the site's SuperNode on them. Rows never leave their site.
"""
