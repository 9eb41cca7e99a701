//! The creation of a target: its log begins first, and its `format` object, which makes the store a target, comes last.

use std::sync::Arc;

use crate::error::Error;
use crate::key::Key;
use crate::log;
use crate::name::Name;
use crate::store::{ObjectStore, put_own};
use crate::target::{Layout, Target};

impl Target {
    /// Makes an empty store a target, encrypted if a key is given. An interrupted creation can be repeated.
    pub fn create(store: Arc<dyn ObjectStore>, layout: Layout, key: Option<&Key>) -> Result<Target, Error> {
        let (target, format) = Target::prepare(store, layout, key)?;
        log::begin(&target)?;
        match put_own(&*target.store, &Name::format(), format.as_bytes())? {
            true => Ok(target),
            false => Err(Error::TargetExists),
        }
    }
}
