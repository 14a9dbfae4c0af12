"""Configuration: presets, files and single keys; every mistake is one sentence that names it."""

import tomllib
from pathlib import Path

import pytest

from fedseal.config import Config, load_config, parse, parse_value, presets
from fedseal.errors import UserError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", presets())
def test_every_preset_survives_a_round_trip(name: str) -> None:
    config = load_config(name)
    again = parse(tomllib.loads(config.to_toml()), "again")
    assert again == config and again.fingerprint() == config.fingerprint()


def test_a_method_with_a_table_among_its_options_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "nest.py"
    file.write_text(
        "from fedseal.methods.fedseal import FedSEAL\n"
        "class Nest(FedSEAL):\n    w: dict[str, float] = {'a': 1.0}\n"
    )
    config = load_config("demo", {"method": f"{file}:Nest"})
    assert "[Nest.w]\na = 1.0\n" in config.explained()
    assert parse(tomllib.loads(config.explained()), "shown") == config


def test_presets_have_titles_and_bases_are_hidden() -> None:
    assert {"demo", "fmnist-lenet", "folders"} <= presets().keys()
    assert all(presets().values())
    assert not [name for name in presets() if name.startswith("base-")]


def test_a_file_extends_a_preset_and_another_file(tmp_path: Path) -> None:
    write(tmp_path / "one.toml", 'extends = "demo"\nrounds = 7\n[fedseal]\ntheta = 0.05\n')
    path = write(tmp_path / "two.toml", 'extends = "one.toml"\n[fedseal]\nnegative = false\n')
    config = load_config(path, {"client.lr": 0.5})
    method = config.to_dict()["fedseal"]
    assert (config.rounds, config.data.labels, config.client.lr) == (7, 500, 0.5)
    assert (method["theta"], method["negative"], method["positive_weight"]) == (0.05, False, 0.25)


def test_the_fingerprint_covers_what_decides_the_result_alone() -> None:
    base = load_config("demo")
    same = load_config("demo", {"engine.workers": 7, "server-sl": {}})
    assert base.fingerprint() == same.fingerprint()
    for key, value in (("seed", 1), ("fedseal.theta", 0.2), ("data.alpha", 0.5), ("method", "server-sl")):
        assert load_config("demo", {key: value}).fingerprint() != base.fingerprint()
    longer = load_config("demo", {"rounds": 99})
    assert longer.fingerprint() != base.fingerprint()
    assert longer.fingerprint(ignore=["rounds"]) == base.fingerprint(ignore=["rounds"])


@pytest.mark.parametrize(
    ("method", "key", "value", "matters"),
    [
        ("server-sl", "client.epochs", 9, False),
        ("server-sl", "cohort", 2, False),
        ("server-sl", "augment.m", 5, False),
        ("server-sl", "augment.shift", 1, True),
        ("server-sl", "server.epochs", 9, True),
        ("fedavg-sl", "augment.weak_first", True, False),
        ("fedavg-sl", "client.epochs", 9, True),
        ("fedavg-fixmatch", "augment.m", 5, True),
    ],
)
def test_what_a_method_does_not_use_is_not_in_its_fingerprint(
    method: str, key: str, value: object, matters: bool
) -> None:
    base, other = (load_config("demo", {"method": method, **more}) for more in ({}, {key: value}))
    assert (base.fingerprint() != other.fingerprint()) == matters


def test_strong_views_at_the_server_do_matter() -> None:
    keys = {"method": "server-sl", "server.augment": "strong"}
    assert (
        load_config("demo", keys).fingerprint() != load_config("demo", keys | {"augment.m": 5}).fingerprint()
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("20", 20), ("0.5", 0.5), ("true", True), ("lenet", "lenet"), ('"20"', "20"), ("", ""), ("a b", "a b")],
)
def test_values_of_set_are_toml_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("round", 3, "demo: unknown key 'round' (did you mean 'rounds'?)."),
        ("xyz", 3, "demo: unknown key 'xyz'; known are method, seed, rounds, "),
        ("options", {}, "demo: unknown key 'options'"),
        ("data.label", 3, "demo: unknown key 'data.label' (did you mean 'labels'?)."),
        ("engine.worker", 3, "demo: unknown key 'engine.worker' (did you mean 'workers'?)."),
        ("fedseal.thta", 0.1, "demo: unknown key 'fedseal.thta' (did you mean 'theta'?)."),
        ("server-sl.theta", 0.1, "demo: unknown key 'server-sl.theta'"),
        ("rounds", "many", "demo: 'rounds' is 'many', but it should be a valid integer"),
        ("rounds", 2.5, "demo: 'rounds' is 2.5, but it should be a valid integer"),
        ("data", 5, "demo: 'data' is 5, but it should be a valid dictionary"),
        ("fedseal", 5, "demo: 'fedseal' is 5, but it should be a valid dictionary"),
        (
            "fedseal.ensemble",
            "perhaps",
            "demo: 'fedseal.ensemble' is 'perhaps', but it should be a valid bool",
        ),
        ("rounds", 0, "demo: 'rounds' is 0, but it should be greater than or equal to 1."),
        ("seed", -1, "demo: 'seed' is -1, but it should be greater than or equal to 0."),
        ("client.lr", -1, "demo: 'client.lr' is -1, but it should be greater than 0."),
        ("client.lr", float("nan"), "demo: 'client.lr' is nan, but it should be a finite number."),
        ("server.momentum", 1, "demo: 'server.momentum' is 1, but it should be less than 1."),
        ("fedseal.theta", 1.5, "demo: 'fedseal.theta' is 1.5, but it should be less than or equal to 1."),
        ("data.alpha", 0, "demo: 'data.alpha' is 0, but it should be greater than 0."),
        (
            "model.name",
            "vgg",
            "demo: 'model.name' is 'vgg', but it should be 'lenet', 'resnet9' or 'resnet18'.",
        ),
        ("data.source", "mnist", "demo: 'data.source' is 'mnist', but it should be 'fashion-mnist', "),
        ("data.clients", 0, "demo: in 'data', clients must be at least 1."),
        ("data.held_out_test", 5, "demo: in 'data', test_per_client and held_out_test exclude each other"),
        ("method", "fedsael", "demo: method must be one of fedseal, "),
        ("method", ["fedseal"], "demo: method must be one of fedseal, "),
        ("method", {"name": "fedseal"}, "demo: method must be one of fedseal, "),
        ("rounds.more", 1, "'rounds.more' cannot be set: 'rounds' is not a section."),
    ],
)
def test_a_bad_key_is_named(key: str, value: object, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("demo", {key: value})
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_folders_need_a_path_and_no_counts() -> None:
    with pytest.raises(UserError, match=r"in 'data', source = \"folders\" needs path\."):
        load_config("folders", {"data.path": ""})
    with pytest.raises(UserError, match="clients does not apply to folders"):
        load_config("folders", {"data.clients": 3})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rounds = \n", "{path} is not valid TOML: Invalid value (at line 1, column 10)."),
        ("rounds = 3\nrounds = 4\n", "{path} is not valid TOML: Cannot overwrite a value"),
        ("extends = 5\n", "{path}: extends is 5, but must be a preset's name or a file's."),
        (
            'extends = "dmo"\n',
            "There is no preset 'dmo' (did you mean 'demo'?); a file's name ends in .toml.",
        ),
        ('extends = "gone.toml"\n', "There is no configuration file {folder}/gone.toml; 'fedseal presets'"),
        ('extends = "bad.toml"\n', "{path} extends itself through {path}: remove one 'extends'."),
        ('extends = "x/../bad.toml"\n', "x/../bad.toml extends itself through {path}: remove one 'extends'."),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = write(tmp_path / "bad.toml", text)
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError) as error:
        load_config(path)
    assert sentence.format(path=path, folder=tmp_path) in str(error.value)


def test_a_file_that_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    with pytest.raises(
        UserError, match=r"There is no configuration file .*bad\.toml; 'fedseal presets' lists"
    ):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00rounds")
    with pytest.raises(
        UserError, match=r"bad\.toml cannot be read \(it is no UTF-8 text\): give a TOML file"
    ):
        load_config(path)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(
        UserError, match=r"There is no preset 'fmnist-lnet' \(did you mean 'fmnist-lenet'\?\)"
    ):
        load_config("fmnist-lnet")
    with pytest.raises(UserError, match="There is no preset 'zzz'; known are cifar10-resnet9, demo, "):
        load_config("zzz")


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("key", ["rounds", "server.lr", "data.clients", "model.width", "fedseal.theta"])
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(UserError, match=rf"in '{key}', true and false are no numbers"):
        load_config("demo", {key: True})
