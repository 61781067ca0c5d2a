"""What runs on the devices: engines that train, engines that generate, and those that score."""
