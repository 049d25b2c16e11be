//! What an invitation looks like: one word, with a hash of the cloud's authority and a secret in it.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::policy::SecretHash;

/// An invitation's code. It is a secret, and displays as what is given to who sets a machine up.
#[derive(Clone, PartialEq, Eq)]
pub struct Code {
    pin: Pin,
    secret: [u8; SECRET_BYTES],
}

/// The first half of the SHA-256 of an authority's certificate (DER).
pub type Pin = [u8; PIN_BYTES];

/// A text that is no code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "that is no invitation: want the {CODE_CHARS} letters, digits, - and _ that `tunnel invite` has printed"
)]
pub struct CodeError;

impl Code {
    /// A new one of the cloud with this authority.
    pub fn random(pin: Pin) -> Self {
        Self { pin, secret: rand::random() }
    }

    /// Of the authority that the cloud has to show.
    pub fn pin(&self) -> Pin {
        self.pin
    }

    /// What the cloud knows the invitation by, and nobody else.
    pub fn secret(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.secret)
    }

    /// By which the cloud keeps it.
    pub(super) fn hash(&self) -> SecretHash {
        SecretHash::of(&self.secret())
    }
}

impl FromStr for Code {
    type Err = CodeError;

    fn from_str(text: &str) -> Result<Self, CodeError> {
        let text = text.trim().strip_prefix(START).ok_or(CodeError)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| CodeError)?;
        let (pin, secret) = bytes.split_first_chunk().ok_or(CodeError)?;
        Ok(Self { pin: *pin, secret: secret.try_into().map_err(|_| CodeError)? })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{START}{}", URL_SAFE_NO_PAD.encode([self.pin.as_slice(), &self.secret].concat()))
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// 128 bits that nobody finds a second certificate for.
const PIN_BYTES: usize = 16;

/// 128 bits that nobody guesses.
const SECRET_BYTES: usize = 16;

/// How a code begins: what follows may be `-`, which a command line would take for an option's.
const START: char = 'i';

/// That, and as many as 32 bytes take.
const CODE_CHARS: usize = 44;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_one_word_that_is_read_as_it_was_printed() {
        let code = Code::random([7; PIN_BYTES]);
        let text = code.to_string();
        assert_eq!(text.len(), CODE_CHARS);
        assert!(!Code::random([0xf8; PIN_BYTES]).to_string().starts_with('-'), "that is an option");
        assert_eq!(format!(" {text}\n").parse(), Ok(code.clone()));
        assert_eq!((code.pin(), format!("{code:?}").as_str()), ([7; PIN_BYTES], "***"));
        for bad in ["", "abc", &text[1..], &format!("{text}A"), &text.replace(&text[..1], "!")] {
            assert_eq!(bad.parse::<Code>(), Err(CodeError), "{bad}");
        }
    }
}
