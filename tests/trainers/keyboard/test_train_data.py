"""The data a run is given: other columns, empty files, clients' text where public text is asked for."""

from tests.trainers.keyboard import toy
from tests.trainers.keyboard.test_train import one_line
from trainers import cli
from trainers.keyboard import corpus


def test_an_empty_data_file_is_named(tmp_path, capsys):
    (tmp_path / "nothing.jsonl").touch()
    config = toy.config(tmp_path, data=str(tmp_path / "nothing.jsonl"))
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "nothing.jsonl is empty" in one_line(capsys)


def test_columns_of_other_names_can_be_given(tmp_path, capsys):
    config = toy.config(tmp_path)
    renamed = (
        (tmp_path / "clients.jsonl").read_text().replace('"client_id"', '"user"').replace('"text"', '"said"')
    )
    (tmp_path / "other.jsonl").write_text(renamed)
    other = toy.config(tmp_path, data=str(tmp_path / "other.jsonl"))
    assert cli.main(["keyboard", *toy.argv(other)]) == 2
    assert "--client-field" in one_line(capsys)
    given = toy.config(tmp_path, data=str(tmp_path / "other.jsonl"), client_field="user", text_field="said")
    assert corpus.load(given).digests == corpus.load(config).digests


def test_clients_text_is_not_taken_as_public(tmp_path, capsys):
    config = toy.config(tmp_path, public=str(tmp_path / "clients.jsonl"), vocabulary="public")
    assert cli.main(["keyboard", *toy.argv(config)]) == 2
    assert "clients' own data" in one_line(capsys)
