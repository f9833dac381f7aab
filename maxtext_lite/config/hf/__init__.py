"""What a Hugging Face directory says of a config: config.json, tokenizer keys and the files of weights."""
