"""The options with which each example takes seconds."""

SMALL: dict[str, list[str]] = {
    "digits.py": [],
    "lightning_cnn.py": ["--trials", "3", "--epochs", "3"],
    "lora.py": ["--trials", "2", "--epochs", "1", "--sentences", "60", "--steps", "3"],
}
