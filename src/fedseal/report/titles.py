"""How accuracies, models and a method's own numbers are called in reports."""

from fedseal.core import Method
from fedseal.storage.accuracies import PREFIXES

MODELS = {"model": "wᵗ, after the server's step", "average": "w̄, the clients' average"}
SYMBOLS = {"model": "wᵗ", "average": "w̄"}
EXPLANATIONS = {
    "model": "wᵗ: the global model in round t, after the server has trained it on its labelled images.",
    "average": "w̄: the average of the models that the clients send back. The next round starts from it.",
}
IMAGES = {"official": "official test set", "client": "test with each client's class mix"}


def model_of(name: str) -> str:
    """The model that an accuracy belongs to: "model" or "average"."""
    return "average" if name.startswith(PREFIXES["average"]) else "model"


def accuracy_title(name: str) -> str:
    """The title of an accuracy: `average_test_accuracy` is "test, w̄"."""
    model = model_of(name)
    images = name.removeprefix(PREFIXES[model]).removesuffix("_accuracy")
    return f"{IMAGES.get(images, images.replace('_', ' '))}, {SYMBOLS[model]}"


def metric_title(method: Method, name: str) -> str:
    """The title of a method's own number: from `Method.titles`, or the name with spaces."""
    return method.titles.get(name, name.replace("_", " "))


def heading(title: str) -> str:
    """A title with a capital first letter; Greek letters are symbols and stay as they are."""
    return title[:1].upper() + title[1:] if title[:1].isascii() else title
