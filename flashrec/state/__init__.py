"""What state is: its layout, how it is captured from torch objects, sealed and moved."""
