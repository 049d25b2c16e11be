//! Types for parts of Kubernetes' objects.

/// Takes over from the whole type what a part of its objects is called. The part has its metadata in a field of that name.
macro_rules! part_of {
    ($part:ident, $whole:ty) => {
        impl Resource for $part {
            type DynamicType = ();
            type Scope = <$whole as Resource>::Scope;

            fn kind((): &()) -> Cow<'_, str> {
                <$whole>::kind(&())
            }

            fn group((): &()) -> Cow<'_, str> {
                <$whole>::group(&())
            }

            fn version((): &()) -> Cow<'_, str> {
                <$whole>::version(&())
            }

            fn plural((): &()) -> Cow<'_, str> {
                <$whole>::plural(&())
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(crate) use part_of;
