"""The configuration: its fingerprint, and errors that name the bad key."""

import tomllib
from pathlib import Path

import pytest
from pydantic import Field

from fedseal.config.config import Config, parse
from fedseal.config.load import list_presets, load_config
from fedseal.config.sections import TrainingSettings
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.methods.fedseal import FedSEAL


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_survives_a_round_trip(name: str) -> None:
    config = load_config(name)
    again = parse(tomllib.loads(config.to_toml()), "again")
    assert again == config and again.fingerprint() == config.fingerprint()


def test_method_with_a_table_among_its_options_is_written_as_toml(tmp_path: Path) -> None:
    file = tmp_path / "nest.py"
    file.write_text(
        "from fedseal.methods.fedseal import FedSEAL\n"
        "class Nest(FedSEAL):\n    w: dict[str, float] = {'a': 1.0}\n"
    )
    config = load_config("fmnist-lenet", {"method": f"{file}:Nest"})
    assert "[Nest.w]\na = 1.0\n" in config.to_annotated_toml()
    assert parse(tomllib.loads(config.to_annotated_toml()), "shown") == config


def test_fingerprint_covers_only_what_affects_the_result() -> None:
    base = load_config("fmnist-lenet")
    same = load_config("fmnist-lenet", {"engine.workers": 7, "server-sl": {}})
    assert base.fingerprint() == same.fingerprint()
    for key, value in (("seed", 1), ("fedseal.theta", 0.2), ("data.alpha", 0.5), ("method", "server-sl")):
        assert load_config("fmnist-lenet", {key: value}).fingerprint() != base.fingerprint()
    for epochs in (0, 20):  # of bootstrapping, whose augmentation is strong
        known = {"method": "fedavg-sl", "bootstrap.epochs": epochs}
        n = [load_config("fmnist-lenet", {**known, "augment.n": n}).fingerprint() for n in (2, 6)]
        assert (n[0] == n[1]) == (epochs == 0)
    longer = load_config("fmnist-lenet", {"rounds": 99})
    assert longer.fingerprint() != base.fingerprint()
    assert longer.fingerprint(ignore=["rounds"]) == base.fingerprint(ignore=["rounds"])


def test_new_option_with_its_default_keeps_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds for options of sections and of methods. Any other value changes the fingerprint."""

    class NewClient(TrainingSettings):
        warm_up: int = 0

    class NewConfig(Config):
        client: NewClient = Field(default_factory=NewClient)
        novelty: float = 0.0

    base = load_config("fmnist-lenet", {"client.lr": 0.5})
    raw = base.to_dict()
    assert NewConfig.model_validate(raw).fingerprint() == base.fingerprint()
    for changed in ({"novelty": 1.0}, {"client": raw["client"] | {"warm_up": 3}}):
        assert NewConfig.model_validate(raw | changed).fingerprint() != base.fingerprint()

    class NewMethod(FedSEAL):
        sharpness: float = 1.0

    monkeypatch.setitem(METHODS, "fedseal", NewMethod)
    assert load_config("fmnist-lenet", {"client.lr": 0.5}).fingerprint() == base.fingerprint()
    assert (
        load_config("fmnist-lenet", {"client.lr": 0.5, "fedseal.sharpness": 2}).fingerprint()
        != base.fingerprint()
    )


def test_explicit_default_keeps_the_fingerprint() -> None:
    """An empty section or a value that equals its default does not affect the fingerprint."""
    plain = Config()
    for key, value in (("rounds", 150), ("data", {}), ("fedseal", {"theta": 0.1}), ("client", {"lr": 0.001})):
        assert parse({key: value}, "test").fingerprint() == plain.fingerprint()
    assert parse({"client": {"lr": 0.002}}, "test").fingerprint() != plain.fingerprint()


def test_fingerprints_never_change() -> None:
    """Recorded results are found by their fingerprint, so a change would orphan everything under results/."""
    assert load_config("fmnist-lenet").fingerprint() == "4ba899e4a738b033"
    assert load_config("svhn-lenet", {"method": "server-sl"}).fingerprint() == "555146035e53145e"


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
def test_fingerprint_ignores_settings_that_the_method_does_not_use(
    method: str, key: str, value: object, matters: bool
) -> None:
    base, other = (load_config("fmnist-lenet", {"method": method, **more}) for more in ({}, {key: value}))
    assert (base.fingerprint() != other.fingerprint()) == matters


def test_fingerprint_covers_strong_augmentation_at_the_server() -> None:
    keys = {"method": "server-sl", "server.augment": "strong"}
    assert (
        load_config("fmnist-lenet", keys).fingerprint()
        != load_config("fmnist-lenet", keys | {"augment.m": 5}).fingerprint()
    )


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("round", 3, "demo: unknown key 'round' (did you mean 'rounds'?)."),
        ("xyz", 3, "demo: unknown key 'xyz'; choose from method, seed, rounds, "),
        ("options", {}, "demo: unknown key 'options'"),
        ("data.label", 3, "demo: unknown key 'data.label' (did you mean 'labels'?)."),
        ("engine.worker", 3, "demo: unknown key 'engine.worker' (did you mean 'workers'?)."),
        ("fedseal.thta", 0.1, "demo: unknown key 'fedseal.thta' (did you mean 'theta'?)."),
        ("server-sl.theta", 0.1, "demo: unknown key 'server-sl.theta'"),
        ("rounds", "many", "demo: 'rounds' is 'many', but it should be a valid integer"),
        ("rounds", 2.5, "demo: 'rounds' is 2.5, but it should be a valid integer"),
        ("data", 5, "demo: 'data' is 5, but must be a section with keys of its own."),
        ("fedseal", 5, "demo: 'fedseal' is 5, but must be a section with keys of its own."),
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
            "demo: 'model.name' is 'vgg'; choose from lenet, resnet9, resnet18, efficientnet-lite0, FILE",
        ),
        ("data.source", "mnist", "demo: 'data.source' is 'mnist'; choose from fashion-mnist, "),
        ("data.clients", 0, "demo: in 'data', clients must be at least 1."),
        ("model.views", 1, "demo: in 'model', views is for freeze = true"),
        ("method", "fedsael", "demo: method must be one of fedseal, "),
        ("method", ["fedseal"], "demo: method must be one of fedseal, "),
        ("method", {"name": "fedseal"}, "demo: method must be one of fedseal, "),
        ("rounds.more", 1, "'rounds.more' cannot be set: 'rounds' is not a section."),
    ],
)
def test_error_names_the_bad_key(key: str, value: object, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config("demo", {key: value})
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_option_of_a_method_without_a_default(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("from fedseal.methods.fedseal import FedSEAL\nclass Own(FedSEAL):\n    mu: float\n")
    with pytest.raises(UserError) as error:
        load_config("demo", {"method": f"{file}:Own"})
    assert str(error.value) == "demo: 'Own.mu' has no default: set Own.mu."


def test_folders_need_a_path_and_accept_no_counts() -> None:
    with pytest.raises(UserError, match=r"in 'data', source = \"folders\" needs path\."):
        load_config("folders", {"data.path": ""})
    with pytest.raises(UserError, match="clients does not apply to folders"):
        load_config("folders", {"data.clients": 3})


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("key", ["rounds", "server.lr", "data.clients", "model.width", "fedseal.theta"])
def test_booleans_are_not_numbers(key: str) -> None:
    with pytest.raises(UserError, match=rf"in '{key}', a number is needed, not true or false"):
        load_config("demo", {key: True})


def test_a_path_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UserError, match=r"'data.path' is 'caf\\udce9', which is not UTF-8: rename"):
        load_config("folders", {"data.path": "caf\udce9"})
