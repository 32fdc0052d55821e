"""One step of training and all it needs: program, optimizer, checkpoint, record, metrics."""
