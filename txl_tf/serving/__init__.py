"""SavedModels."""
