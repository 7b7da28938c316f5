"""What members see: rows and their order, batches, augmentation."""
