"""Published tables held against our own results: `sentinel-bench reproduce`.

    published.yaml -> published: rows -> cells: a plan of cells -> results -> compare -> document

`agreement` defines when a published number and ours agree.
"""
