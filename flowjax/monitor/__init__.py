"""What a run tells about itself: metrics, their summary, the live screen."""
