"""From tasks to batches: lease, group, reward, credit, buffer, serve; SQLite underneath, HTTP around it."""
