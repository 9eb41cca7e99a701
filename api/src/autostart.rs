//! Autostart: what the daemon starts when the host boots.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

/// An hour; a longer delay would not be an autostart any more.
const DELAY_MAX: u32 = 3600;
const TRIES_MAX: u8 = 100;
/// Network storage may become available later than this host.
const TRIES: u8 = 5;

/// Autostart of a VM, or of a VBD that belongs to no VM, when the host boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Autostart {
    /// Position in the start order, lowest first. Objects with the same number are started together.
    #[serde(default)]
    pub order: u16,
    /// Seconds to wait after this object before objects with a higher number are started.
    #[serde(default, deserialize_with = "delay")]
    #[schema(maximum = 3600)]
    pub delay: u32,
    /// How many times the start is tried.
    #[serde(default = "usual_tries", deserialize_with = "tries")]
    #[schema(minimum = 1, maximum = 100)]
    pub tries: u8,
}

impl Default for Autostart {
    fn default() -> Autostart {
        Autostart { order: 0, delay: 0, tries: TRIES }
    }
}

fn usual_tries() -> u8 {
    TRIES
}

fn delay<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        seconds if seconds > DELAY_MAX => Err(D::Error::custom(format!("a delay must be at most {DELAY_MAX} seconds"))),
        seconds => Ok(seconds),
    }
}

fn tries<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u8, D::Error> {
    match u8::deserialize(deserializer)? {
        tries if (1..=TRIES_MAX).contains(&tries) => Ok(tries),
        _ => Err(D::Error::custom(format!("tries must be 1 to {TRIES_MAX}"))),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::VmPatch;

    #[test]
    fn omitted_fields_have_defaults_and_invalid_ones_are_refused() {
        let parse = |text: &str| serde_json::from_str::<Autostart>(text);
        assert_eq!(parse("{}").unwrap(), Autostart::default());
        assert_eq!(parse(r#"{"order":2,"delay":30,"tries":1}"#).unwrap(), Autostart { order: 2, delay: 30, tries: 1 });
        for wrong in [r#"{"delay":3601}"#, r#"{"tries":0}"#, r#"{"tries":101}"#, r#"{"order":-1}"#, r#"{"up":1}"#] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_patch_clears_or_keeps_autostart() {
        let parse = |text: &str| serde_json::from_str::<VmPatch>(text).unwrap().autostart;
        assert_eq!((parse("{}"), parse(r#"{"autostart":null}"#)), (None, Some(None)));
        assert_eq!(parse(r#"{"autostart":{}}"#), Some(Some(Autostart::default())));
        let taken = serde_json::to_string(&VmPatch { autostart: Some(None), ..VmPatch::default() }).unwrap();
        assert_eq!(taken, r#"{"autostart":null}"#);
    }
}
