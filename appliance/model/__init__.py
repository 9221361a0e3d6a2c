"""Model files: loaders, the model store, the tokenizer and the chat template."""
