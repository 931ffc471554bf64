"""A run's view of itself: metrics, their summary, the live screen."""
