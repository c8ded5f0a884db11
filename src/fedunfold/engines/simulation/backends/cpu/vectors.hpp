// Vectors of BYTES bytes, read and written wherever they lie.

template <class T> struct Vector { typedef T type __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias)); };
template <class T> constexpr int WIDTH = BYTES / sizeof(T);

template <class T> INLINE typename Vector<T>::type& at(T* p) { return *(typename Vector<T>::type*)p; }
template <class T> INLINE const typename Vector<T>::type& at(const T* p) { return *(const typename Vector<T>::type*)p; }
