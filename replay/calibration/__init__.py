"""The engine model against real engines: `validate` compares, `measure` and `fitting` make a profile."""
