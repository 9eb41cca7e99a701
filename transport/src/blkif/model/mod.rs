//! The take-over of a device, killed and failing at every moment.
