"""The page of results is made of what experiments have written, here or elsewhere."""

from train.results import SECTIONS, Arguments, write_page

TITLES = [section.title for section in SECTIONS]


def pretend(runs, section, table):
    """Write what an experiment writes."""
    for path, content in ((runs / section.table, table), (runs / section.figure, "a picture")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_experiments_stay_on_the_page(tmp_path):
    out = tmp_path / "docs" / "results.md"
    assert write_page(Arguments(runs=tmp_path / "nothing", out=out)) == TITLES
    pretend(tmp_path / "here", SECTIONS[0], "| recall | 99 % |\n")
    assert write_page(Arguments(runs=tmp_path / "here", out=out)) == TITLES[1:]
    pretend(tmp_path / "elsewhere", SECTIONS[1], "| trees | 63 % |\n")
    assert write_page(Arguments(runs=tmp_path / "elsewhere", out=out)) == TITLES[2:]
    page = out.read_text()
    assert page.index(SECTIONS[0].text) < page.index("| recall | 99 % |") < page.index("| trees | 63 % |")
    for section in SECTIONS[:2]:
        picture = page.split(f"![{section.title}](")[1].split(")")[0]
        assert (out.parent / picture).read_text() == "a picture"
    # Run again, it replaces what was there.
    pretend(tmp_path / "here", SECTIONS[0], "| recall | 100 % |\n")
    write_page(Arguments(runs=tmp_path / "here", out=out))
    assert "99 %" not in out.read_text()
    assert "| recall | 100 % |" in out.read_text()
