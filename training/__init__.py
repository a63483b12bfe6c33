"""What makes the small trained checkpoint: text generator, tokenizer, model, training, export, evaluation."""
