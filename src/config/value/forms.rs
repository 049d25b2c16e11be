//! Forms of values in structs, for serde's attribute `with`. Optional fields have the same form.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use derive_more::{Deref, From};
use serde::de::{Deserializer, Error};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::config::value::{quantity, with_unit};

/// A duration from `MIN` to `MAX` milliseconds: a whole number with `ms`, `s`, `m`, `h` or `d`.
pub(crate) struct Millis<const MIN: u64, const MAX: u64>;

impl<const MIN: u64, const MAX: u64> Millis<MIN, MAX> {
    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<Duration>,
    {
        let text = String::deserialize(deserializer).map_err(|_| D::Error::custom(DURATION))?;
        let millis = quantity(&text, &DURATIONS).ok_or_else(|| D::Error::custom(DURATION))?;
        if (MIN..=MAX).contains(&millis) {
            return Ok(Duration::from_millis(millis).into());
        }
        let [least, most] = [MIN, MAX].map(|limit| with_unit(limit, WRITTEN));
        Err(D::Error::custom(format_args!("expected a duration from {least} to {most}")))
    }

    pub(crate) fn serialize<S, T>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
        T: Copy + Into<Option<Duration>>,
    {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        (*value).into().map(|time| with_unit(millis(time), WRITTEN)).serialize(serializer)
    }
}

/// A size of at least `MIN` bytes: a whole number with `B`, `KiB`, `MiB` or `GiB`.
pub(crate) struct ByteSize<const MIN: usize>;

impl<const MIN: usize> ByteSize<MIN> {
    pub(crate) fn deserialize<'de, D, T>(deserializer: D) -> Result<T, D::Error>
    where
        D: Deserializer<'de>,
        T: From<usize>,
    {
        let text = String::deserialize(deserializer).map_err(|_| D::Error::custom(SIZE))?;
        let bytes = quantity(&text, &SIZES).and_then(|bytes| usize::try_from(bytes).ok());
        match bytes.ok_or_else(|| D::Error::custom(SIZE))? {
            bytes if bytes < MIN => {
                Err(D::Error::custom(format_args!("expected at least {}", with_unit(MIN as u64, &SIZES))))
            }
            bytes => Ok(bytes.into()),
        }
    }

    pub(crate) fn serialize<S, T>(value: &T, serializer: S) -> Result<S::Ok, S::Error>
    where
        S: Serializer,
        T: Copy + Into<Option<usize>>,
    {
        (*value).into().map(|bytes| with_unit(bytes as u64, &SIZES)).serialize(serializer)
    }
}

/// Reads a whole number from 1 to `MAX`.
pub(crate) fn count<'de, const MAX: usize, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    let number = usize::deserialize(deserializer).ok().filter(|number| (1..=MAX).contains(number));
    number.ok_or_else(|| D::Error::custom(format_args!("expected a whole number from 1 to {MAX}")))
}

/// The path of a file, which need not exist.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize, Deref, From)]
#[deref(forward)]
#[from(forward)]
#[serde(transparent)]
pub struct FilePath(#[serde(deserialize_with = "file")] pub PathBuf);

fn file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
    let text: String = filled_text(deserializer)?;
    if text.contains('\0') {
        return Err(D::Error::custom("expected a file name"));
    }
    Ok(PathBuf::from(text))
}

/// Reads a text that is not empty.
pub(crate) fn filled_text<'de, D: Deserializer<'de>, T: From<String>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text.trim().is_empty() {
        return Err(D::Error::custom("expected a non-empty text; otherwise leave the key out"));
    }
    Ok(text.into())
}

/// Reads an address to listen on.
pub(crate) fn listen_address<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: From<SocketAddr>,
{
    let at = String::deserialize(deserializer)?.parse::<SocketAddr>();
    at.map(T::from).map_err(|_| D::Error::custom(LISTEN_ADDRESS))
}

/// Reads an IP address.
pub(crate) fn ip<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpAddr, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(|_| D::Error::custom("expected an IP address"))
}

/// The address of a remote port.
struct DialAddress(SocketAddr);

impl<'de> Deserialize<'de> for DialAddress {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)?.parse::<SocketAddr>() {
            Ok(at) if at.port() > 0 && !at.ip().is_unspecified() => Ok(Self(at)),
            _ => Err(D::Error::custom("expected ip:port, for example 10.96.0.10:53 or [fd00::1]:9000")),
        }
    }
}

/// Reads a list of addresses of remote ports.
pub(crate) fn remote_addresses<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SocketAddr>, D::Error> {
    let addresses = Vec::<DialAddress>::deserialize(deserializer)?;
    Ok(addresses.into_iter().map(|DialAddress(at)| at).collect())
}

const LISTEN_ADDRESS: &str = "expected ip:port, for example 127.0.0.1:9000, 0.0.0.0:9000 or [::]:9000";

const DURATION: &str =
    "expected a whole number with its unit (ms, s, m, h or d) in quotes, for example \"5s\" or \"500ms\"";

const SIZE: &str = "expected a whole number with its unit (KiB, MiB or GiB) in quotes, for example \"4MiB\"";

/// Units of time, in milliseconds. No timeout needs a smaller unit.
pub(crate) const DURATIONS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// The units in which values are written: 24 hours are "24h", not "1d".
const WRITTEN: &[(&str, u64)] = DURATIONS.split_at(4).0;

/// Units of size, in bytes. Powers of two only: "MB" is ambiguous.
pub(crate) const SIZES: [(&str, u64); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// Maximum number of characters of a wrong value in a message.
pub(super) const MAX_EXCERPT: usize = 60;
