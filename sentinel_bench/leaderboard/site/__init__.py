"""The leaderboards as pages for a browser: a folder that needs nothing but itself.

    site/index.html                             tracks, what each defense lets through, how to read
    site/tracks/<track>/index.html              rankings, matrix, scatter, all rows
    site/tracks/<track>/defense-<name>.html     a defense against each attack, with curves
    site/tracks/<track>/attack-<name>.html      an attack against each defense
    site/data/<track>.json                      what these pages are made of
    site/assets/                                style and script
    site/pages.json                             the files that were written, so that they can go

Names come from strangers: all text is escaped, and no page runs a script but the site's own.
"""

from sentinel_bench.leaderboard.site._write import write

__all__ = ["write"]
