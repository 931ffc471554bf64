"""From tasks to batches: lease, group, select, reward, credit, serve; SQLite underneath, HTTP around it."""
