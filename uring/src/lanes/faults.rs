//! Where tests have a lane fail: at the nth step that can.

#[cfg(test)]
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::{AtomicUsize, Ordering};

/// None, except in tests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    steps_left: Option<Arc<AtomicUsize>>,
}

impl Faults {
    /// The nth step fails, counted from 1.
    #[cfg(test)]
    pub(crate) fn at(step: usize) -> Faults {
        Faults { steps_left: Some(Arc::new(AtomicUsize::new(step))) }
    }

    /// Whether there were fewer steps than that.
    #[cfg(test)]
    pub(crate) fn was_never_met(&self) -> bool {
        self.steps_left.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) > 0)
    }

    /// A step that can fail: with this errno, if it is to.
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
