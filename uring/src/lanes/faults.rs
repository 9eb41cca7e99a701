//! Fault injection into lanes, for tests: the nth step that can fail does.

#[cfg(test)]
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

/// The fault to inject; always none outside of tests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    steps_left: Option<Arc<AtomicUsize>>,
}

impl Faults {
    /// Makes the nth step fail, counted from 1.
    #[cfg(test)]
    pub(crate) fn at(step: usize) -> Faults {
        Faults { steps_left: Some(Arc::new(AtomicUsize::new(step))) }
    }

    /// Returns true if there were too few steps to fail one.
    #[cfg(test)]
    pub(crate) fn was_not_reached(&self) -> bool {
        self.steps_left.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) > 0)
    }

    /// Counts a step that can fail; returns an errno if this one must.
    #[inline]
    pub(crate) fn step(&self) -> Result<(), i32> {
        #[cfg(test)]
        if let Some(left) = &self.steps_left {
            let before = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            if before == Ok(1) {
                return Err(libc::ENOMEM);
            }
        }
        Ok(())
    }
}
