"""The rooms of the package."""

LEVEL = {
    "common": 0,
    "configs": 1,
    "sharding": 2,
    "kernels": 2,
    "tokenizers": 2,
    "optimizers": 2,
    "layers": 3,
    "hf": 3,
    "models": 4,
    "input_pipeline": 4,
    "checkpoint": 5,
    "diagnostics": 5,
    "adapters": 6,
    "inference": 7,
    "trainers": 8,
    "cli": 9,
}
