//! Seed: what cloud-init in a guest reads when the guest boots first (data source NoCloud).
//!
//! Invariant: the texts hold secrets, so they are in requests only: answers, events and messages say at most that a VM
//! has a seed.

use std::fmt;

use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Maximum bytes of each text.
const SEED_TEXT_MAX: usize = 64 << 10;

/// A cloud-init seed. The guest finds it on a read-only disk with the label `cidata`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// `user-data`: a `#cloud-config` document, a script, or anything else that cloud-init accepts.
    pub user_data: SeedText,
    /// `meta-data`. If omitted, it has the UUID of the VM as `instance-id` and its name as `local-hostname`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub meta_data: Option<SeedText>,
    /// `network-config`; cloud-init tries DHCP if it is omitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_config: Option<SeedText>,
}

/// One of its texts: up to 64 KiB of UTF-8. It is not printed by `Debug`.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(into = "String")]
pub struct SeedText(String);

/// What a value in a request must be. Errors of the derived parsers have the value, or a part of it, which is a secret.
struct Expected<T>(&'static str, std::marker::PhantomData<T>);

impl<T> Expected<T> {
    fn wrong<E: Error>(&self) -> E {
        E::custom(format_args!("{}; what was given is not shown, because it may be secret", self.0))
    }
}

/// The methods of a visitor for values that are of another kind.
macro_rules! others_are_refused {
    ($($method:ident: $type:ty),*) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
        $(fn $method<E: Error>(self, _: $type) -> Result<Self::Value, E> {
            Err(self.wrong())
        })*
    };
}

impl<'de> Visitor<'de> for Expected<SeedText> {
    type Value = SeedText;

    others_are_refused!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64);

    fn visit_str<E: Error>(self, text: &str) -> Result<SeedText, E> {
        SeedText::try_from(text.to_owned()).map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for SeedText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SeedText, D::Error> {
        deserializer
            .deserialize_any(Expected("a text of a seed is a JSON string", std::marker::PhantomData::<SeedText>))
    }
}

impl<'de> Visitor<'de> for Expected<Seed> {
    type Value = Seed;

    others_are_refused!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_f64: f64, visit_str: &str);

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Seed, A::Error> {
        let (mut user_data, mut meta_data, mut network_config) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            let field = match &*key {
                "user_data" => &mut user_data,
                "meta_data" => &mut meta_data,
                "network_config" => &mut network_config,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    return Err(self.wrong());
                }
            };
            if field.is_some() {
                return Err(A::Error::custom("a field of the seed is there twice"));
            }
            *field = Some(map.next_value::<Option<SeedText>>()?);
        }
        let user_data = user_data.flatten().ok_or_else(|| A::Error::missing_field("user_data"))?;
        Ok(Seed { user_data, meta_data: meta_data.flatten(), network_config: network_config.flatten() })
    }
}

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Seed, D::Error> {
        let what = "a seed is a JSON object with the texts user_data, and optionally meta_data and network_config: \
                    {\"user_data\": \"#cloud-config\\n...\"}";
        deserializer.deserialize_any(Expected(what, std::marker::PhantomData::<Seed>))
    }
}

impl SeedText {
    /// The text as it was given. It may contain secrets.
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
        assert!(serde_json::from_str::<Seed>(r##"{"user_data":"","meta_data":null}"##).unwrap().meta_data.is_none());
        assert!(serde_json::from_str::<SeedText>(&json).is_ok());
        let long = serde_json::to_string(&"x".repeat(SEED_TEXT_MAX + 1)).unwrap();
        let refused = serde_json::from_str::<SeedText>(&long).unwrap_err().to_string();
        assert!(refused.contains("at most 65536 bytes, not 65537"), "{refused}");
    }

    #[test]
    fn an_invalid_seed_is_refused_without_its_contents() {
        for wrong in [
            r##""hunter2""##,
            r##"["hunter2"]"##,
            r##"4711"##,
            r##"true"##,
            r##"{"user_data":4711}"##,
            r##"{"user_data":["hunter2"]}"##,
            r##"{"user_data":{"password":"hunter2"}}"##,
            r##"{"user_data":"hunter2","user_data":"hunter2"}"##,
            r##"{"user_data":"","hunter2":1}"##,
            r##"{"meta_data":"hunter2"}"##,
        ] {
            let refused = serde_json::from_str::<Seed>(wrong).unwrap_err().to_string();
            assert!(!refused.contains("hunter2") && !refused.contains("4711"), "{refused}");
            assert!(!refused.contains("true"), "{refused}");
        }
    }
}
