"""What stands beside an exported model: `model.json` for programs, the card `README.md` for people."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from fedseal.config.config import Config
from fedseal.data.catalogue import PUBLISHED
from fedseal.rounds import LAST_ROUNDS
from fedseal.storage.accuracies import PREFIXES
from fedseal.storage.classifier import Classifier
from fedseal.storage.summary import describe_privacy

# By format: what to import, and how to compute logits [n, M] of pixels [n, C, H, W].
USAGE = {
    "onnx": (
        "import json, numpy, onnxruntime\nfrom PIL import Image, ImageOps",
        'onnxruntime.InferenceSession("model.onnx").run(None, {"images": pixels})[0]',
    ),
    "torchscript": (
        "import json, numpy, torch\nfrom PIL import Image, ImageOps",
        'torch.jit.load("model.pt")(torch.tensor(pixels)).numpy()',
    ),
    "safetensors": (
        "import json, numpy, torch\nfrom network import network\nfrom PIL import Image, ImageOps\n"
        "from safetensors.torch import load_file",
        'network(load_file("model.safetensors"), torch.tensor(pixels)).numpy()',
    ),
}
IMAGES = {
    "client": "clients' test images, predicted with each client's own class mix",
    "test": "test images of the run",
    "official": "the data set's own test images",
    "validation": "the server's validation images",
}


def describe(classifier: Classifier, format: str, file: str) -> dict[str, Any]:
    """The content of `model.json`."""
    size, channels, calibration = classifier.size, classifier.channels, classifier.calibration
    return {
        "format": format,
        "file": file,
        "classes": list(classifier.classes),
        "input": {
            "name": "images",
            "type": "uint8",
            "shape": ["n", channels, size, size],
            "values": "0 to 255, not normalised",
            "colours": _colours(channels),
            "preparation": _preparation(size, channels),
        },
        "output": {"name": "logits", "type": "float32", "shape": ["n", len(classifier.classes)]},
        "calibration": calibration and calibration.to_dict(),
    }


def write_card(
    classifier: Classifier, config: Config, summary: Mapping[str, Any], format: str, licence: str
) -> str:
    """The model card."""
    labels, source = summary["labels"], PUBLISHED.get(config.data.source)
    data = f"{source.title} (licence: {source.licence})" if source else f"own images ({config.data.source})"
    parameters = sum(value.numel() for value in classifier.model.parameters())
    facts = {
        "network": f"{PurePath(config.model.name).name}, {parameters:,} parameters",
        "classes": f"{len(classifier.classes)}: {', '.join(classifier.classes)}",
        "data": data,
        "labels": f"{labels['training']} for training, {labels['validation']} for validation",
        "clients": f"{summary['clients']}, with unlabelled images",
        "method": PurePath(summary["method"]).name,
        "rounds": summary["rounds"],
        "seed": summary["seed"],
        "trained with": f"fedseal {summary['versions']['fedseal']}",
        "licence": licence,
    }
    if privacy := describe_privacy(summary):
        facts["differential privacy"] = privacy
    size, channels = classifier.size, classifier.channels
    return CARD.format(
        facts="\n".join(f"| {name} | {_cell(value)} |" for name, value in facts.items()),
        lines=prediction_lines(classifier, format, '"image.png"'),
        size=size,
        channels=channels,
        colours=_colours(channels),
        preparation="\n".join(f"{i}. {step}" for i, step in enumerate(_preparation(size, channels), 1)),
        accuracies=_accuracies(summary),
        last=min(LAST_ROUNDS, summary["rounds"]),
        mixes=MIXES
        if classifier.calibration
        else "The model has no calibration, since it is of an older version.",
    )


def write_script(classifier: Classifier, format: str) -> str:
    """`predict.py`: the lines of the card, for an image that the command line names."""
    return "import sys\n" + prediction_lines(classifier, format, "sys.argv[1]")


def prediction_lines(classifier: Classifier, format: str, image: str) -> str:
    """Five lines of Python, after the imports, that predict an image without fedseal."""
    imports, logits = USAGE[format]
    size, channels = classifier.size, classifier.channels
    return LINES.format(
        imports=imports,
        image=image,
        mode="L" if channels == 1 else "RGB",
        logits=logits,
        size=size,
        channels=channels,
    )


def _preparation(size: int, channels: int) -> list[str]:
    return [
        "Rotate the image as its EXIF data say.",
        f"Convert it to {_colours(channels)}, 8 bits per channel.",
        "Crop it to a centred square.",
        f"Resize it to {size}×{size}, bilinear with antialiasing.",
    ]


def _colours(channels: int) -> str:
    return "grey" if channels == 1 else "RGB"


def _accuracies(summary: Mapping[str, Any]) -> str:
    """A row for each accuracy of the exported model: on which images, and its values."""
    prefix = PREFIXES[summary["evaluate"]]
    rows = {}
    for images, text in IMAGES.items():
        if values := summary.get(f"{prefix}{images}_accuracy"):
            rows[text] = f"{values['last']:.2%} | {values['mean_last_10']:.2%}"
    return "\n".join(f"| {text} | {values} |" for text, values in rows.items())


def _cell(value: object) -> str:
    """A value in a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")


LINES = """\
{imports}

image = ImageOps.exif_transpose(Image.open({image}))
if image.mode[0] in "IF": raise SystemExit("This image has more than 8 bits per pixel: convert it first.")
image = ImageOps.fit(image.convert("{mode}"), ({size}, {size}), Image.Resampling.BILINEAR)
pixels = numpy.asarray(image).reshape(1, {size}, {size}, {channels}).transpose(0, 3, 1, 2)
[logits] = {logits}
print(json.load(open("model.json"))["classes"][logits.argmax()], 1 / numpy.exp(logits - logits.max()).sum())
"""

CARD = """# Image classifier

A model that was trained by semi-supervised federated learning, and how to use it without fedseal.

| | |
|---|---|
{facts}

## Use

```python
{lines}```

It prints the class and its confidence, the largest softmax of the logits. The same lines are in `predict.py`:
run `python predict.py image.png` in this folder. `model.json` lists the classes in the order of the logits.

## Input

`images`: uint8 [n, {channels}, {size}, {size}], {colours}, values from 0 to 255, any number n.
The network normalises the values itself. Prepare every image as for training:

{preparation}

Pixels of 16 bits must be divided by 256 first.

## Accuracy

| images | this model | mean of the last {last} rounds |
|---|---|---|
{accuracies}

This model is that of the last round. The mean is taken over the models of the last {last} rounds of one run,
so it depends less on when training ended. Runs with other seeds differ.

## Class mixes

{mixes}
"""

MIXES = """\
The confidences suit the class mix of the server's labelled images. Where the classes are mixed differently,
predict with the local mix. `calibration` in `model.json` has the values for it:

1. Calibrate: p = softmax(logits / `temperature` + `bias`).
2. For each class, multiply p by its share in the local mix / its share in `mix`. Divide by the sum.

An unknown local mix can be estimated from twenty or more unlabelled images. Start with `mix`, apply step 2 to
all images, take the mean of the results as the next local mix, and repeat until it stays the same.
`fedseal predict --adapt` does all of this, with more care for few images (fedseal's docs/label-shift.md)."""
