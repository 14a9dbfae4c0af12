"""The engines by name. To add one, add a file here and a line to `ENGINES`.

A value is the path of a function (setup, memories) -> Engine, which is imported when it is needed.
"""

ENGINES: dict[str, str] = {
    "local": "fedseal.engines.local:LocalEngine",
    "flower": "fedseal.engines.flower.simulation:simulate",
}
