//! Seed: what cloud-init in a guest reads when the guest boots first (data source NoCloud).
//!
//! Invariant: the texts hold secrets, so they are in requests only: answers, events and messages say at most that a VM
//! has a seed.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Maximum bytes of each text.
const SEED_TEXT_MAX: usize = 64 << 10;

/// A cloud-init seed. The guest finds it on a read-only disk with the label `cidata`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// `user-data`: a `#cloud-config` document, a script, or anything else that cloud-init accepts.
    pub user_data: SeedText,
    /// `meta-data`. If omitted, it has the UUID of the VM as `instance-id` and its name as `local-hostname`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meta_data: Option<SeedText>,
    /// `network-config`; cloud-init tries DHCP if it is omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config: Option<SeedText>,
}

/// One of its texts: up to 64 KiB of UTF-8. It is not printed by `Debug`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SeedText(String);

impl SeedText {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for SeedText {
    type Error = String;

    fn try_from(text: String) -> Result<SeedText, String> {
        match text.len() {
            len if len > SEED_TEXT_MAX => {
                Err(format!("a text of a seed must have at most {SEED_TEXT_MAX} bytes, not {len}"))
            }
            _ => Ok(SeedText(text)),
        }
    }
}

impl From<SeedText> for String {
    fn from(text: SeedText) -> String {
        text.0
    }
}

impl fmt::Debug for SeedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} bytes>", self.0.len())
    }
}

impl PartialSchema for SeedText {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String).max_length(Some(SEED_TEXT_MAX));
        text.write_only(Some(true)).description(Some("A text of a cloud-init seed: up to 64 KiB of UTF-8.")).into()
    }
}

impl ToSchema for SeedText {}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_seed_keeps_its_texts_and_does_not_print_them() {
        let seed: Seed = serde_json::from_str(r#"{"user_data":"password: secret"}"#).unwrap();
        assert_eq!(seed.user_data.as_str(), "password: secret");
        assert!(!format!("{seed:?}").contains("secret"), "{seed:?}");
        let json = serde_json::to_string(&"x".repeat(SEED_TEXT_MAX)).unwrap();
        assert!(serde_json::from_str::<SeedText>(&json).is_ok());
        let long = serde_json::to_string(&"x".repeat(SEED_TEXT_MAX + 1)).unwrap();
        let refused = serde_json::from_str::<SeedText>(&long).unwrap_err().to_string();
        assert!(refused.contains("at most 65536 bytes, not 65537"), "{refused}");
    }
}
