"""Who was trained on, guessed from the model or from the transcript."""
