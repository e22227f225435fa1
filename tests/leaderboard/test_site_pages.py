"""The pages: nothing on them can act, links lead to files, and only own files are removed."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files as resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from sentinel_bench.errors import ConfigError, RunError
from sentinel_bench.leaderboard import build, site

HOSTILE = (
    "<script>alert(1)</script>",
    "\"' onmouseover=alert(1) x='",
    "../../../etc/passwd",
    "javascript:alert(1)",
    "né\u202e\u0000\n|`[x](y)",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 400,
    "",
)


class Page(HTMLParser):
    """What is on a page."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.tags, self.open = path, [], []
        self.words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == [], (path, self.open)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (self.path, tag, self.open[-5:])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def ids(self) -> list[str]:
        return [a["id"] for _, a in self.tags if "id" in a]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def checked(root: Path) -> dict[str, Page]:
    """Check what must hold for every page, and return them by their places below `site`."""
    found = {str(p.relative_to(root)): Page(p) for p in sorted(root.rglob("*.html"))}
    for place, page in found.items():
        assert len(page.ids) == len({*page.ids}), place
        assert {tag for tag, _ in page.tags}.isdisjoint(
            {"iframe", "object", "embed", "img", "base"}
        )
        scripts = [a for tag, a in page.tags if tag == "script"]
        assert [[*a] for a in scripts] == [["src"]], place
        (policy,) = [a["content"] for tag, a in page.tags if "http-equiv" in a]
        assert "script-src 'self' file:;" in policy and policy.startswith("default-src 'none';")
        for tag, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]
            if tag == "th":
                assert attributes.get("scope") in ("col", "row"), place
            for name in ("src", "href"):
                if name in attributes:
                    _leads_somewhere(page, attributes[name] or "")
    return found


def _leads_somewhere(page: Page, link: str) -> None:
    assert re.fullmatch(r"[\w./@%+-]*(#[\w.-]+)?", link), link
    place, part = urldefrag(link)
    target = page.path.parent / unquote(place) if place else page.path
    assert target.is_file(), (str(page.path), link)
    if part:
        assert f'id="{part}"' in target.read_text(encoding="utf-8"), (str(page.path), link)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def small(save: Any, tmp_path: Path) -> Path:
    """Three defenses, two attacks, three seeds of one of them; and the folder of the runs."""
    for seed in range(3):
        save(f"n{seed}", "none", "none", seed)
        save(f"z{seed}", "zeros", "sentinel", seed, f1=90.0 + seed, excess_loss=0.25)
    save("u", "zeros", "none", recall=0.0, f1=0.0, excess_loss=0.5, undetected_damage=0.5)
    save("c", "delay", "cascade", diverged=True, excess_loss=None, recall=0.0)
    return tmp_path / "runs"


def test_pages_of_tracks_and_entries_are_written_and_listed(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert site.write([small], out) == out / "site" / "index.html"
    found = checked(out / "site")
    assert sorted(found) == [
        "index.html",
        *(f"tracks/core/attack-{name}.html" for name in ("delay", "none", "zeros")),
        *(f"tracks/core/defense-{name}.html" for name in ("cascade", "none", "sentinel")),
        "tracks/core/index.html",
    ]
    listed = json.loads((out / "site" / "pages.json").read_text())["files"]
    assert sorted(listed) == sorted(tree(out / "site"))
    data = json.loads((out / "site" / "data" / "core.json").read_text())
    assert len(data["cells"]) == 8 and len(data["rows"]) == 4
    assert "91.0 ± 2.5" in found["tracks/core/defense-sentinel.html"].text  # 4.303 / sqrt(3)
    assert "No curves were recorded for: zeros" in found["tracks/core/defense-sentinel.html"].text
    assert "diverged" in found["tracks/core/index.html"].text


def test_the_same_results_give_the_same_bytes(small: Path, tmp_path: Path) -> None:
    site.write([small], tmp_path / "a")
    site.write([small], tmp_path / "b")
    once = tree(tmp_path / "a")
    assert once == tree(tmp_path / "b")
    site.write([small], tmp_path / "a")
    assert once == tree(tmp_path / "a")


def test_names_of_strangers_cannot_act(save: Any, tmp_path: Path) -> None:
    for number, name in enumerate(HOSTILE):
        outcome = "invalid" if number % 2 else "broken"
        for kind in ("attack", "defense", "both"):
            path = save(f"{kind}{number}", outcome=outcome, reason=name, knowledge=name)
            content = json.loads(path.read_text())
            cell = content["cell"]
            cell |= {key: name for key in ("attack", "defense") if kind in (key, "both")}
            cell |= {"mode": name, "tuned": {name: name}, "code": name}
            cell["setting"]["model"] = name
            content |= {"digest": name, "commands": [name]}
            content["scores"]["excess_loss"] = 10.0 - number  # the first is named in the scatter
            content["provenance"]["packages"] = {name: name}
            path.write_text(json.dumps(content))
    (tmp_path / "runs" / "<b>bad").mkdir()
    (tmp_path / "runs" / "<b>bad" / "result.json").write_text("{}")
    site.write([tmp_path / "runs"], tmp_path / "out")
    pages = checked(tmp_path / "out" / "site")
    whole = "".join(page.path.read_text() for page in pages.values())
    for raw in ("<script>alert", "<b>bad", "' onmouseover=", 'href="javascript:', "49{%"):
        assert raw not in whole
    assert html.escape(HOSTILE[0]) in whole and "{{ 7 * 7 }}" in html.unescape(whole)
    outside = [p for p in (tmp_path / "out").rglob("*") if not str(p).startswith(str(tmp_path))]
    assert outside == [] and sorted(p.name for p in (tmp_path / "out").iterdir()) == ["site"]


def test_a_name_that_no_file_can_hold_is_left_out(save: Any, tmp_path: Path) -> None:
    save("a")
    path = save("b", attack="ones")
    path.write_text(path.read_text().replace('"ones"', '"\\ud800"'))
    site.write([tmp_path / "runs"], tmp_path / "out")
    text = checked(tmp_path / "out" / "site")["index.html"].text
    assert "runs/b/result.json : 'utf-8' codec can't encode character" in text


def test_invalid_cells_alone_give_pages_that_say_so(save: Any, tmp_path: Path) -> None:
    save("a", outcome="invalid", reason="attack: it broke", **dict.fromkeys(("f1", "recall")))
    site.write([tmp_path / "runs"], tmp_path / "out")
    pages = checked(tmp_path / "out" / "site")
    track = pages["tracks/core/index.html"].text
    assert "seeds 0/0/0: attack: it broke" in track and "invalid†" in track
    assert "No attack was measured against a defense here yet." in track
    assert "No attack was measured here yet." in pages["index.html"].text


def test_a_baseline_of_one_seed_has_pages_without_intervals(save: Any, tmp_path: Path) -> None:
    save("a", "none", "none")
    site.write([tmp_path / "runs"], tmp_path / "out")
    pages = checked(tmp_path / "out" / "site")
    assert "for reference: the model without a defense" in pages["tracks/core/index.html"].text
    assert "1.0 ±" not in pages["tracks/core/index.html"].text


def test_settings_that_must_not_be_compared_are_apart(save: Any, tmp_path: Path) -> None:
    save("a", steps=350)
    save("b", steps=200)
    site.write([tmp_path / "runs"], tmp_path / "out")
    pages = checked(tmp_path / "out" / "site")
    text = pages["tracks/core/index.html"].text
    assert "Rows of different settings must not be compared." in text
    assert text.count("Means over seeds.") == 2


def test_the_pages_link_the_tables_beside_them(small: Path, tmp_path: Path) -> None:
    build([small], tmp_path / "out")
    (tmp_path / "out" / "core" / "board.csv").write_text("attack\n")
    site.write([small], tmp_path / "out")
    page = checked(tmp_path / "out" / "site")["tracks/core/index.html"]
    links = {a.get("href") for tag, a in page.tags if tag == "a"}
    assert {"../../../core/board.csv", "../../../core/README.md", "../../data/core.json"} <= links


def test_pages_of_entries_that_are_gone_are_removed_and_nothing_else(
    small: Path, save: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    site.write([small], out)
    mine = out / "site" / "tracks" / "core" / "attack-mine.html"
    mine.write_text("mine")
    gone = out / "site" / "tracks" / "core" / "attack-delay.html"
    assert gone.is_file()
    (small / "c" / "result.json").unlink()
    site.write([small], out)
    assert not gone.exists() and not gone.with_name("defense-cascade.html").exists()
    assert mine.read_text() == "mine"
    checked_files = json.loads((out / "site" / "pages.json").read_text())["files"]
    assert "tracks/core/attack-delay.html" not in checked_files


@pytest.mark.parametrize(
    "listed",
    [
        '{"files": ["../secret.html", "../../secret", "/etc/x", "tracks/core/../../../secret", 7]}',
        '{"files": "tracks"}', "[]", "{", "null", '{"files": {"a": 1}}', "\xff",
        '{"files": ["data/notes.txt", "tracks/core/notes.html", "tracks/x/attack-a.html"]}',
    ],
)  # fmt: skip
def test_a_list_that_was_changed_removes_nothing_of_others(
    small: Path, tmp_path: Path, listed: str
) -> None:
    out = tmp_path / "out"
    site.write([small], out)
    (out / "secret.html").write_text("s")
    (tmp_path / "secret").write_text("s")
    for name in ("data/notes.txt", "tracks/core/notes.html"):
        (out / "site" / name).write_text("n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "attack-a.html").write_text("e")
    (out / "site" / "tracks" / "x").symlink_to(elsewhere)
    (out / "site" / "pages.json").write_bytes(listed.encode("latin-1"))
    site.write([small], out)
    assert (out / "secret.html").is_file() and (tmp_path / "secret").is_file()
    assert (out / "site" / "data" / "notes.txt").is_file()
    assert (out / "site" / "tracks" / "core" / "notes.html").is_file()
    assert (elsewhere / "attack-a.html").is_file()


def test_tracks_that_are_not_built_now_stay_while_their_board_is_there(
    save: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    one, two = save("a/x", track="core").parents[1], save("b/x", track="mixed").parents[1]
    build([one, two], out)
    site.write([one, two], out)
    whole = tree(out / "site")
    site.write([one], out)
    assert tree(out / "site") == whole
    site.write([one, two], out, track="mixed")
    assert tree(out / "site") == whole
    shutil.rmtree(out / "mixed")
    site.write([one], out)
    assert not (out / "site" / "tracks" / "mixed").exists()
    assert ">mixed<" not in checked(out / "site")["index.html"].path.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "rows": [{}]}'])
def test_data_that_was_changed_makes_its_track_disappear(
    save: Any, tmp_path: Path, content: str
) -> None:
    out = tmp_path / "out"
    one, two = save("a/x", track="core").parents[1], save("b/x", track="mixed").parents[1]
    build([one, two], out)
    site.write([one, two], out)
    (out / "site" / "data" / "mixed.json").write_text(content)
    site.write([one], out)
    assert "tracks/mixed/index.html" not in checked(out / "site")


def test_a_track_may_have_the_name_of_anything(save: Any, tmp_path: Path) -> None:
    for name in ("pages", "index", "assets", "data", "core.json"):
        save(name, track=name)
    site.write([tmp_path / "runs"], tmp_path / "out")
    pages = checked(tmp_path / "out" / "site")
    assert len([name for name in pages if name.endswith("/index.html")]) == 5


def test_mistakes_are_one_line(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        site.write([tmp_path / "nowhere"], tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "site").write_text("a file")
    with pytest.raises(RunError, match="site: cannot be written: "):
        site.write([small], tmp_path / "out")


def test_every_template_is_installed() -> None:
    import tomllib

    names = {p.name for p in (resources("sentinel_bench.leaderboard.site") / "templates").iterdir()}
    assert names == {
        *("base.html", "index.html", "track.html", "entry.html", "macros.html"),
        *("style.css", "site.js"),
    }
    path = Path(__file__).parents[2] / "pyproject.toml"
    settings = tomllib.loads(path.read_text())["tool"]["setuptools"]
    assert "sentinel_bench.leaderboard.site" in settings["packages"]
    assert settings["package-data"]["sentinel_bench.leaderboard.site"] == ["templates/*"]
