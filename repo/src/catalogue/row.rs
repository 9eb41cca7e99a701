//! Conversion of values to columns: UUIDs and times as text, words as in the API, everything else as JSON.

use api::{Labels, LogicalBlockSize, Problem};
use jiff::Timestamp;
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Params, Row};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::{View, failed};

/// A UUID, stored as text.
#[derive(Clone, Copy)]
pub struct Id(pub Uuid);
/// A time, stored as text.
pub struct Time(pub Timestamp);
/// An enumeration without data, stored as its name.
pub struct Word<T>(pub T);
/// Any other value, stored as JSON.
pub struct Json<T>(pub T);

/// A logical block size, stored as a number of bytes.
pub struct Block(pub LogicalBlockSize);

impl ToSql for Block {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(u32::from(self.0).into())
    }
}

impl FromSql for Block {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Block> {
        let bytes = u32::column_result(value)?;
        bytes.try_into().map(Block).map_err(|why: String| FromSqlError::other(std::io::Error::other(why)))
    }
}

impl ToSql for Id {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.to_string().into())
    }
}

impl FromSql for Id {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Id> {
        Uuid::parse_str(value.as_str()?).map(Id).map_err(FromSqlError::other)
    }
}

impl ToSql for Time {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.to_string().into())
    }
}

impl FromSql for Time {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Time> {
        value.as_str()?.parse().map(Time).map_err(FromSqlError::other)
    }
}

impl<T: Serialize> ToSql for Word<T> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        match serde_json::to_value(&self.0).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))? {
            serde_json::Value::String(word) => Ok(word.into()),
            other => Err(rusqlite::Error::ToSqlConversionFailure(format!("{other} is not a string").into())),
        }
    }
}

impl<T: DeserializeOwned> FromSql for Word<T> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Word<T>> {
        let word = serde_json::Value::String(value.as_str()?.to_owned());
        serde_json::from_value(word).map(Word).map_err(FromSqlError::other)
    }
}

impl<T: Serialize> ToSql for Json<T> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let text =
            serde_json::to_string(&self.0).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
        Ok(text.into())
    }
}

impl<T: DeserializeOwned> FromSql for Json<T> {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Json<T>> {
        serde_json::from_str(value.as_str()?).map(Json).map_err(FromSqlError::other)
    }
}

/// Checked text, which was checked before it was kept.
pub fn text<T: TryFrom<String, Error = String>>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let text: String = row.get(column)?;
    T::try_from(text)
        .map_err(|why| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, why.into()))
}

/// The tags of an object, and the strings that programs keep with it.
pub fn labels(row: &Row<'_>) -> rusqlite::Result<Labels> {
    Ok(Labels { tags: row.get::<_, Json<_>>("tags")?.0, other_config: row.get::<_, Json<_>>("other_config")?.0 })
}

impl View<'_> {
    /// All rows of a query.
    pub(super) fn rows<T>(
        &self,
        sql: &str,
        values: impl Params,
        of: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, Problem> {
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        let rows = statement.query_map(values, of).map_err(failed)?;
        rows.collect::<rusqlite::Result<Vec<T>>>().map_err(failed)
    }

    /// The one row of a query, if there is one.
    pub(super) fn row<T>(
        &self,
        sql: &str,
        values: impl Params,
        of: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, Problem> {
        use rusqlite::OptionalExtension;
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        statement.query_row(values, of).optional().map_err(failed)
    }
}
