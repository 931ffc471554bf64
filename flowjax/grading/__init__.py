"""Text to verdict: questions, mathematics, multiple choice, programs in a sandbox."""
