"""A plugin of pytest: Hypothesis draws the same examples every time, and does not look for a smaller one that fails."""

from hypothesis import Phase, settings

settings.register_profile(
    "mutants", database=None, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("mutants")
