"""One file per model family, each reads like the paper."""
