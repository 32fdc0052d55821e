"""One step of training and all it needs: optimizer, checkpoint, record, metrics."""
