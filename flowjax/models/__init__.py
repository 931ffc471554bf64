"""Language models: configuration, decoder, LoRA, sharding, Hugging Face folders, nano models."""
