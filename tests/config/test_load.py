"""Loading configurations from presets, files and single keys, with errors that name the mistake."""

from pathlib import Path

import pytest

from fedseal.config.load import list_presets, load_config, parse_assignment
from fedseal.errors import UserError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_presets_have_titles_and_bases_are_hidden() -> None:
    assert {"demo", "fmnist-lenet", "folders"} <= list_presets().keys()
    assert all(list_presets().values())
    assert not [name for name in list_presets() if name.startswith("base-")]


def test_file_extends_a_preset_and_another_file(tmp_path: Path) -> None:
    write(tmp_path / "one.toml", 'extends = "demo"\nrounds = 7\n[fedseal]\ntheta = 0.05\n')
    path = write(tmp_path / "two.toml", 'extends = "one.toml"\n[fedseal]\nnegative = false\n')
    config = load_config(path, {"client.lr": 0.5})
    method = config.to_dict()["fedseal"]
    assert (config.rounds, config.data.labels, config.client.lr) == (7, 500, 0.5)
    assert (method["theta"], method["negative"], method["positive_weight"]) == (0.05, False, 0.25)


@pytest.mark.parametrize(
    ("text", "value"),
    [("20", 20), ("0.5", 0.5), ("true", True), ("lenet", "lenet"), ('"20"', "20"), ("", ""), ("a b", "a b")],
)
def test_assigned_values_are_toml_or_text(text: str, value: object) -> None:
    assert parse_assignment(f"some.key = {text}") == ("some.key", value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds = \n", "{path} is not valid TOML: Invalid value (at line 1, column 10)."),
        ("rounds = 3\nrounds = 4\n", "{path} is not valid TOML: Cannot overwrite a value"),
        ("extends = 5\n", "{path}: extends is 5, but must name a preset or a file."),
        (
            'extends = "dmo"\n',
            "There is no preset 'dmo' (did you mean 'demo'?); the name of a file ends in .toml.",
        ),
        ('extends = "gone.toml"\n', "There is no configuration file {folder}/gone.toml; 'fedseal presets'"),
        ('extends = "bad.toml"\n', "{path} extends itself through {path}: remove one 'extends'."),
        ('extends = "x/../bad.toml"\n', "x/../bad.toml extends itself through {path}: remove one 'extends'."),
    ],
)
def test_error_names_the_bad_file(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path / "bad.toml", text)
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError) as error:
        load_config(path)
    assert sentence.format(path=path, folder=tmp_path) in str(error.value)


def test_missing_file_and_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(
        UserError, match=r"There is no configuration file .*bad\.toml; 'fedseal presets' lists"
    ):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00rounds")
    with pytest.raises(UserError, match=r"Cannot read .*bad\.toml \(not UTF-8 text\): give a TOML file"):
        load_config(path)


def test_file_that_starts_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_text('extends = "demo"\nrounds = 7\n', "utf-8-sig")
    assert load_config(path).rounds == 7


def test_long_chain_of_files(tmp_path: Path) -> None:
    write(tmp_path / "0.toml", 'extends = "demo"\n')
    for number in range(1, 1200):
        write(tmp_path / f"{number}.toml", f'extends = "{number - 1}.toml"\n')
    assert load_config(tmp_path / "40.toml") == load_config("demo")
    last = tmp_path / "1199.toml"
    with pytest.raises(UserError) as error:
        load_config(last)
    assert str(error.value) == f"{last} extends more than 50 files in a row: join some of them."


@pytest.mark.parametrize("key", ["method", "model.name"])
def test_null_character_in_a_path(key: str) -> None:
    with pytest.raises(UserError, match=r"demo: 'my\\x00file.py:name' has a null character"):
        load_config("demo", {key: "my\0file.py:name"})


def test_error_names_the_unknown_preset() -> None:
    with pytest.raises(
        UserError, match=r"There is no preset 'fmnist-lnet' \(did you mean 'fmnist-lenet'\?\)"
    ):
        load_config("fmnist-lnet")
    with pytest.raises(UserError, match="There is no preset 'zzz'; choose from cifar10-pretrained, "):
        load_config("zzz")
