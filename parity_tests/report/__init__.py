"""The pages and figures of a proof."""
