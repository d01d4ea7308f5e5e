"""The trackers that come with gcore, each around its own package, which is imported when one is opened."""
