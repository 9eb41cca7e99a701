//! Values that are validated on construction, so that no later code has to check them.

use std::borrow::Borrow;
use std::fmt;
use std::path::{Component, Path};
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, SchemaFormat, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use crate::visible::refuse_unseen;

/// Maximum characters of a name: more than any table shows, and less than any format's limit.
const NAME_MAX: usize = 128;
/// Maximum bytes of a description.
const DESCRIPTION_MAX: usize = 4096;
/// Maximum bytes of a path (`PATH_MAX` in linux/limits.h, without the terminator).
const PATH_MAX: usize = 4095;

/// The name of an object: 1 to 128 characters without control characters, and without whitespace at either end. A
/// name that looks like a UUID is rejected, because it would be taken for one. Requests for a name that is taken are
/// refused; what is found in a repository may still have the name of something else.
///
/// A name that somebody chooses now must not have invisible characters either ([`FromStr`], and fields of requests);
/// one that was recorded or found may, and is shown with [`crate::visible`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Free text about an object: up to 4096 bytes, without control characters other than line feeds and tabs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Description(String);

impl Description {
    /// Whether the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A size in bytes: positive, a multiple of 512, at most 2^62.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u64", into = "u64")]
pub struct Size(u64);

/// The size of the sectors that a guest addresses: 512 or 4096 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum LogicalBlockSize {
    /// 512 bytes.
    #[default]
    Small,
    /// 4096 bytes.
    Large,
}

/// The path of a file or directory on the host: absolute, without `.` and `..`, and without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AbsolutePath(String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(text: String) -> Result<Name, String> {
        if text.chars().any(char::is_control) {
            return Err("a name must not contain control characters".into());
        }
        match text.chars().count() {
            0 => Err("a name must not be empty".into()),
            count if count > NAME_MAX => Err(format!("a name must have at most {NAME_MAX} characters, not {count}")),
            _ if text.trim() != text => Err("a name must not start or end with whitespace".into()),
            _ if Uuid::parse_str(&text).is_ok() => Err("a name must not look like a UUID".into()),
            _ => Ok(Name(text)),
        }
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Name, String> {
        refuse_unseen("a name", text)?;
        text.to_owned().try_into()
    }
}

impl TryFrom<String> for Description {
    type Error = String;

    fn try_from(text: String) -> Result<Description, String> {
        if text.chars().any(|char| char.is_control() && !"\n\t".contains(char)) {
            return Err("a description must not contain control characters other than line feeds and tabs".into());
        }
        match text.len() {
            len if len > DESCRIPTION_MAX => {
                Err(format!("a description must have at most {DESCRIPTION_MAX} bytes, not {len}"))
            }
            _ => Ok(Description(text)),
        }
    }
}

impl TryFrom<u32> for LogicalBlockSize {
    type Error = String;

    fn try_from(bytes: u32) -> Result<LogicalBlockSize, String> {
        match bytes {
            512 => Ok(LogicalBlockSize::Small),
            4096 => Ok(LogicalBlockSize::Large),
            _ => Err(format!("a logical block size must be 512 or 4096, not {bytes}")),
        }
    }
}

impl From<LogicalBlockSize> for u32 {
    fn from(size: LogicalBlockSize) -> u32 {
        match size {
            LogicalBlockSize::Small => 512,
            LogicalBlockSize::Large => 4096,
        }
    }
}

impl fmt::Display for LogicalBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        u32::from(*self).fmt(f)
    }
}

impl FromStr for LogicalBlockSize {
    type Err = String;

    fn from_str(text: &str) -> Result<LogicalBlockSize, String> {
        let bytes =
            text.parse::<u32>().map_err(|_| format!("a logical block size must be 512 or 4096, not '{text}'"))?;
        bytes.try_into()
    }
}

impl TryFrom<u64> for Size {
    type Error = String;

    fn try_from(bytes: u64) -> Result<Size, String> {
        match bytes {
            0 => Err("a size must be greater than zero".into()),
            bytes if bytes % 512 != 0 => {
                Err(format!("a size in bytes must be a multiple of 512, which {bytes} is not"))
            }
            bytes if bytes > 1 << 62 => Err(format!("a size must be at most 2^62 bytes, not {bytes}")),
            bytes => Ok(Size(bytes)),
        }
    }
}

impl TryFrom<String> for AbsolutePath {
    type Error = String;

    fn try_from(text: String) -> Result<AbsolutePath, String> {
        if text.chars().any(char::is_control) {
            return Err("this path must not contain control characters".into());
        }
        if text.len() > PATH_MAX {
            return Err(format!("a path must have at most {PATH_MAX} bytes"));
        }
        if !text.starts_with('/') {
            return Err(format!("'{text}' is not absolute: start it with /"));
        }
        // `Path::components` skips `.` in the middle, which is as confusing as the ones it returns.
        if text.split('/').any(|part| part == "." || part == "..") {
            return Err(format!("'{text}' contains . or ..: give the resolved path"));
        }
        let plain: String = Path::new(&text)
            .components()
            .filter(|component| *component != Component::RootDir)
            .flat_map(|component| ["/", component.as_os_str().to_str().unwrap_or_default()])
            .collect();
        Ok(AbsolutePath(if plain.is_empty() { "/".into() } else { plain }))
    }
}

/// A UUID that a client chooses for what it creates. Those that stand for nothing are refused (RFC 9562, 5.9, 5.10).
pub(crate) fn chosen<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Uuid>, D::Error> {
    match Option::<Uuid>::deserialize(deserializer)? {
        Some(uuid) if uuid.is_nil() || uuid.is_max() => {
            Err(D::Error::custom("this UUID names nothing: choose a random one"))
        }
        uuid => Ok(uuid),
    }
}

/// Text that somebody chooses in a request: checked more strictly than what was recorded earlier.
pub(crate) fn given<'de, T: FromStr<Err = String>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}

/// The same for a field that may be omitted.
pub(crate) fn given_if<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err = String>,
    D: Deserializer<'de>,
{
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
}

/// A field of a change: absent means unchanged, null that there is none any more.
pub(crate) fn change<'de, T, D>(deserializer: D) -> Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(deserializer).map(Some)
}

/// The schema of text with a length limit in characters.
pub(crate) fn text_schema(min: usize, max: usize, pattern: Option<&str>, description: &str) -> RefOr<Schema> {
    let text = ObjectBuilder::new().schema_type(Type::String).description(Some(description));
    text.min_length(Some(min)).max_length(Some(max)).pattern(pattern).into()
}

impl PartialSchema for Name {
    fn schema() -> RefOr<Schema> {
        let pattern = r"^[^\s\x00-\x1f\x7f-\x9f]([^\x00-\x1f\x7f-\x9f]*[^\s\x00-\x1f\x7f-\x9f])?$";
        text_schema(1, NAME_MAX, Some(pattern), "The name of an object; must not look like a UUID.")
    }
}

impl PartialSchema for Description {
    fn schema() -> RefOr<Schema> {
        text_schema(
            0,
            DESCRIPTION_MAX,
            Some(r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$"),
            "Free text about an object, without control characters other than line feeds and tabs.",
        )
    }
}

impl PartialSchema for AbsolutePath {
    fn schema() -> RefOr<Schema> {
        let pattern = r"^/[^\x00-\x1f\x7f-\x9f]*$";
        text_schema(
            1,
            PATH_MAX,
            Some(pattern),
            "The absolute path of a file or directory on the host, without . and ..",
        )
    }
}

impl PartialSchema for Size {
    fn schema() -> RefOr<Schema> {
        let number =
            ObjectBuilder::new().schema_type(Type::Integer).format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)));
        let number = number.minimum(Some(512)).maximum(Some(1_i64 << 62)).multiple_of(Some(512));
        number.description(Some("A size in bytes, a multiple of 512.")).into()
    }
}

impl PartialSchema for LogicalBlockSize {
    fn schema() -> RefOr<Schema> {
        let number = ObjectBuilder::new().schema_type(Type::Integer).enum_values(Some([512, 4096]));
        number.description(Some("The size of the sectors that a guest addresses, in bytes.")).into()
    }
}

impl ToSchema for LogicalBlockSize {}
impl ToSchema for Name {}
impl ToSchema for Description {}
impl ToSchema for AbsolutePath {}
impl ToSchema for Size {}

impl Size {
    /// The size in bytes.
    pub fn bytes(self) -> u64 {
        self.0
    }
}

impl From<Size> for u64 {
    fn from(size: Size) -> u64 {
        size.0
    }
}

impl AbsolutePath {
    /// The value as a path.
    pub fn as_path(&self) -> &Path {
        Path::new(&self.0)
    }
}

/// The common methods of the text types.
macro_rules! text {
    ($type:ty) => {
        impl $type {
            /// The value as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> String {
                value.0
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// The methods and the schema of a text type, whose values match a pattern.
macro_rules! checked {
    ($type:ty, $min:expr, $max:expr, $pattern:expr, $description:expr) => {
        text!($type);

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<$type, String> {
                text.to_owned().try_into()
            }
        }

        impl utoipa::PartialSchema for $type {
            fn schema() -> RefOr<Schema> {
                text_schema($min, $max, Some($pattern), $description)
            }
        }

        impl ToSchema for $type {}
    };
}

pub(crate) use {checked, text};

text!(Name);
text!(Description);
text!(AbsolutePath);

impl FromStr for Description {
    type Err = String;

    fn from_str(text: &str) -> Result<Description, String> {
        text.to_owned().try_into()
    }
}

impl FromStr for AbsolutePath {
    type Err = String;

    fn from_str(text: &str) -> Result<AbsolutePath, String> {
        text.to_owned().try_into()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_name_must_be_printable_and_typable() {
        assert!("web root №1".parse::<Name>().is_ok());
        assert!("x".repeat(NAME_MAX).parse::<Name>().is_ok());
        for wrong in ["", " a", "a ", "a\nb", "a\u{85}b", "\u{7f}", &"x".repeat(NAME_MAX + 1)] {
            assert!(wrong.parse::<Name>().is_err(), "{wrong:?}");
        }
        assert!("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d".parse::<Name>().unwrap_err().contains("UUID"));
    }

    #[test]
    fn an_invisible_character_is_refused_in_requests_and_read_from_records() {
        let refused = "web\u{202e}bd".parse::<Name>().unwrap_err();
        assert!(refused.contains("U+202E") && refused.contains("web\\u{202e}bd"), "{refused}");
        let json = "\"web\u{200b}\"";
        let recorded: Name = serde_json::from_str(json).unwrap();
        assert_eq!(recorded.as_str(), "web\u{200b}");
        let asked =
            |name: &str| format!("{{\"sr\":\"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d\",\"size\":512,\"name\":{name}}}");
        assert!(serde_json::from_str::<crate::VdiCreate>(&asked("\"web\"")).is_ok());
        let refused = serde_json::from_str::<crate::VdiCreate>(&asked(json)).unwrap_err().to_string();
        assert!(refused.contains("U+200B"), "{refused}");
        let patch = |field: &str| serde_json::from_str::<crate::VmPatch>(field).map_err(|error| error.to_string());
        assert!(patch("{\"name\":\"a\u{ad}b\"}").unwrap_err().contains("U+00AD"));
        assert!(patch("{\"tags\":[\"a\",\"b\u{2066}\"]}").unwrap_err().contains("U+2066"));
        assert!(patch("{\"name\":null,\"tags\":[\"a\"]}").is_ok());
    }

    #[test]
    fn a_description_may_have_lines() {
        assert!("first\n\tsecond".parse::<Description>().is_ok());
        assert!("a\u{1b}[31m".parse::<Description>().is_err());
        assert!("x".repeat(DESCRIPTION_MAX + 1).parse::<Description>().is_err());
    }

    #[test]
    fn a_size_is_whole_sectors_and_does_not_overflow() {
        assert_eq!(Size::try_from(1 << 30).unwrap().bytes(), 1 << 30);
        for wrong in [0, 1, 511, 513, u64::MAX, (1 << 62) + 512] {
            assert!(Size::try_from(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_path_must_be_absolute_and_normalized() {
        assert_eq!("/srv//vms/".parse::<AbsolutePath>().unwrap().as_str(), "/srv/vms");
        assert_eq!("/".parse::<AbsolutePath>().unwrap().as_str(), "/");
        for wrong in ["", "srv", "./a", "/srv/../etc", "/srv/./a", "/a/..", "/a\0b", "/a\nb"] {
            assert!(wrong.parse::<AbsolutePath>().is_err(), "{wrong:?}");
        }
        assert!(format!("/{}", "x".repeat(PATH_MAX)).parse::<AbsolutePath>().is_err());
    }

    #[test]
    fn values_from_json_are_validated() {
        assert!(serde_json::from_str::<Name>("\"a\\u0007\"").is_err());
        assert!(serde_json::from_str::<Size>("1.5").is_err());
        assert!(serde_json::from_str::<Size>("-512").is_err());
        assert_eq!(serde_json::to_string(&Size::try_from(512).unwrap()).unwrap(), "512");
    }
}
