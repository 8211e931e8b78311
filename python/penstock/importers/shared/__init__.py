"""What the importers share: options, chunks of rows, Arrow types and encodings."""
