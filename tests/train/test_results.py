"""The page of results holds what the experiments have written, and says what it lacks."""

from train import results


def test_the_page_holds_tables_and_figures(tmp_path, capsys):
    runs, page = tmp_path / "runs", tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    (runs / "mqar_cpu").mkdir(parents=True)
    (runs / "mqar_cpu" / "results.md").write_text("    a command\n\n| swa | 16 % |\n")
    (runs / "mqar_cpu" / "results.png").write_bytes(b"picture")
    (runs / "longer").mkdir()
    (runs / "longer" / "results.md").write_text("without a figure")
    results.main(results.Arguments(runs=runs, out=page))
    text = page.read_text()
    assert "\n\n    a command\n\n| swa | 16 % |\n\n" in text
    assert "without a figure" not in text
    (picture,) = (page.parent / "results").iterdir()
    assert picture.read_bytes() == b"picture"
    assert f"(results/{picture.name})" in text
    missing = capsys.readouterr().err
    assert "not run yet: Longer than trained" in missing
    assert "recall" not in missing


def test_every_experiment_has_a_figure_of_its_own():
    assert len({section.figure for section in results.SECTIONS}) == len(results.SECTIONS)
